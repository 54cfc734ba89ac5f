"""Relatives of other methods, each small and in one file, in the same registry.

What is here has passed the same tests as all methods. Of some the paper's text could not be read in
full: their docstrings say what is inferred.

- `daso`: averages in each node, and delayed ones between nodes; `daso_nodes`: its nodes.
- `sel_sync`: averages where gradients change.
"""
