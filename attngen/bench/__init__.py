"""Side-by-side benchmarks: attngen's kernel against the attention libraries that are installed.

`cells` says what is measured, `recognize` what a spec means in a peer's words, `peers` how each library is called,
`timing` how a number is taken, `memory` what a backward should hold, `variants` the grid of masks and scores,
`rehearsal` compiles a grid beforehand, `runner` puts them together, `report` prints, stores and plots.
"""
