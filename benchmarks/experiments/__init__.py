"""Experiments that train encoders and compare what they learn, outside the product.

`python -m benchmarks.experiments NAME`: `papers` holds the papers' experiments beside their own
figures (docs/reproduction.md), `study` compares memories on users' streams (docs/study.md). Both
share the files of this folder.
"""
