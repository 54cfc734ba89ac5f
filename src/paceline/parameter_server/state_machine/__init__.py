"""The parameter server as a state machine: no I/O, no clock, no threads."""
