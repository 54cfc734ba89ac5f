"""Methods that are exact, and whose messages travel past the end of backward.

- `priority`: what the next forward pass uses first is sent first.
- `worker`: one worker of such a method.
"""

from paceline.methods.past_backward.priority import Priority

__all__ = ["Priority"]
