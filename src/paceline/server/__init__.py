"""The parameter server: a state machine (`protocol`), and the shells that run it."""
