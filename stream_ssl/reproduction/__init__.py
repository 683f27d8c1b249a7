"""The papers' experiments, run again through the product's own learner, beside their figures.

`stream-ssl reproduce NAME`: docs/reproduction.md says what each experiment is.
"""
