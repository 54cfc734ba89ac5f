"""Methods that are exact, and whose messages travel past the end of backward.

- `dear`: a sum's first half beside backward, the second beside the next forward pass.
- `priority`: what the next forward pass uses first is sent first.
- `worker`: one worker of such a method.
"""

from paceline.methods.forward_overlap.dear import DeAR
from paceline.methods.forward_overlap.priority import Priority

__all__ = ["DeAR", "Priority"]
