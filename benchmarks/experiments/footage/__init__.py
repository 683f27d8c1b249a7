"""The footage: memories compared on recordings of a robot, of cameras and of a web crawl."""
