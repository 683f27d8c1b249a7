"""Networks: the encoder that is trained, and pretrained ones to begin with."""
