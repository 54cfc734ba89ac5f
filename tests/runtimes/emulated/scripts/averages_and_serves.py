# Trains by collectives, then with a server beside rank 0.
import torch

import paceline

paceline.init()
for method in ("bsp", "asp"):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = paceline.distribute(model, optimizer, method=method)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    optimizer.finish()
print("trained", paceline.rank(), "of", paceline.world_size())
