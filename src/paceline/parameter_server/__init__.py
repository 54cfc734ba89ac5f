"""The parameter server: a state machine (`parameter_server.state_machine.server`), and the shells that run it."""
