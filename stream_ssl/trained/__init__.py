"""A trained encoder in use: load it, embed, search and evaluate with it, export it."""
