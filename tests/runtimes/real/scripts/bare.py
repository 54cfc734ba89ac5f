# No __main__ guard; the argument says how the script ends.
import sys

import torch
import torch.distributed as dist

import paceline

model = torch.nn.Sequential(torch.nn.Linear(9, 40), torch.nn.Linear(40, 3))
optimizer = paceline.distribute(model, torch.optim.Adam(model.parameters()))
group = dist.new_group()  # of the script's own, and never destroyed by it
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(4, 9)).square().mean().backward()
    optimizer.step()
last = torch.ones(3)
dist.all_reduce(last, group=group)
if sys.argv[1] == "finishes":
    optimizer.finish()
elif sys.argv[1] == "destroys":
    dist.destroy_process_group()
else:
    assert sys.argv[1] == "returns"
    under_way = dist.all_reduce(torch.ones(1000), async_op=True)  # nobody waits for it
