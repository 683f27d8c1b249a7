"""DUEL's duplicate counts, updated as rows change, and the evictions that follow from them.

`simulate` runs Algorithms 1 and 2 among a few candidates. The engines find the candidates, and
prove (or estimate, in `approximate`) that no other slot would have been evicted. `linear` uses the
sum of all rows, `exact` a count of every slot, and `approximate` the cells of an index.
"""
