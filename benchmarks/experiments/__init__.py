"""Experiments that train encoders and compare what they learn, separate from the product.

`python -m benchmarks.experiments NAME`. `papers` contains the experiments of the papers with the
papers' figures (docs/reproduction.md). `study` compares memories on the streams of users
(docs/study.md). Both use the files of this folder.
"""
