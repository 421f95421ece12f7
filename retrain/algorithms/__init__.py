"""Who gets credit: one pure file per algorithm, with its equation and its paper."""
