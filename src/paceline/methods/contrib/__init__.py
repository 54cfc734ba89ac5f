"""Relatives of other methods, each small and in one file, in the same registry.

They pass the same tests as all methods. The full text of some papers could not be read: the docstrings
say which parts are inferred.

- `daso`: averages in each node, and delayed ones between nodes; `daso_nodes`: its nodes.
- `sel_sync`: averages where gradients change.
"""
