"""Networks: the encoder that is trained, and pretrained encoders to start from."""
