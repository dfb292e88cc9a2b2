import torch

import lazygt

torch.manual_seed(0)
with lazygt.session(workers=1) as session:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    for _ in range(100):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f},", session.stats()["plan_hits"], "of 100 steps replayed")
