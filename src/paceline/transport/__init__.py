"""Messages over ZeroMQ: authentication, framing, and who is still there."""
