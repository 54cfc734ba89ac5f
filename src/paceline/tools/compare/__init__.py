"""Train with several methods, and compare them.

- `runner`: one script under several methods, each in a process of its own; start here.
- `goal`: a metric's value, and when a training reached it.
- `gains`: speed-ups over one machine and over DDP.
- `curves`: metrics against time.
- `report`: the page of a comparison.
"""
