"""DUEL's duplicate counts, kept up as rows change, and whom they evict.

`simulate` is Algorithms 1 and 2 among a few candidates. The engines find candidates and prove, or
in `approximate` estimate, that nobody else would have been evicted: `linear` from the sum of all
rows, `exact` from a count of every slot, `approximate` from the cells of an index.
"""
