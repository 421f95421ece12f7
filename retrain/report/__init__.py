"""`report.html` of a run, from what it wrote; a run itself enters none of this.

- `page`: the file; `charts`, `timeline`, `samples`: its parts, and `histogram` for distributions
- `verdict`: the bottleneck, and problems to look at
"""
