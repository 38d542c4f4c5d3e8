from __future__ import annotations

import math

import pytest
import torch
from ncd_training.config.schema import PretrainConfig
from ncd_training.model.backbone import build_trunk
from ncd_training.model.branches import Trunk
from ncd_training.pretext import MomentumContrast, TrunkAndTail, contrast, follow
from torch import Tensor, nn
from torch.nn.functional import normalize


def unit(rows: int, dim: int = 5) -> Tensor:
    return normalize(torch.randn(rows, dim))


def test_contrast_by_hand() -> None:
    """One query along x. Own key: cosine 0.6; the others: 1 and 0; temperature 0.5."""
    result = contrast(
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([[0.6, 0.8]]),
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        temperature=0.5,
    )
    expected = -math.log(math.exp(1.2) / (math.exp(1.2) + math.exp(2.0) + math.exp(0.0)))
    assert float(result.loss) == pytest.approx(expected)
    assert float(result.accuracy) == 0.0


def test_contrast_is_the_slow_form() -> None:
    torch.manual_seed(0)
    queries, keys, others = unit(4), unit(4), unit(7)
    losses, right = [], []
    for query, key in zip(queries, keys, strict=True):
        own = math.exp(float(query @ key) / 0.2)
        rest = [math.exp(float(query @ other) / 0.2) for other in others]
        losses.append(-math.log(own / (own + sum(rest))))
        right.append(own > max(rest))
    result = contrast(queries, keys, others, temperature=0.2)
    assert float(result.loss) == pytest.approx(sum(losses) / 4, rel=1e-5)
    assert float(result.accuracy) == sum(right) / 4


def test_following_is_an_exact_moving_average() -> None:
    slow, fast = nn.Linear(2, 1), nn.Linear(2, 1)
    before = slow.weight.detach().clone()
    follow(slow, fast, momentum=0.75)
    assert torch.equal(slow.weight, before * 0.75 + fast.weight * 0.25)


def small(**settings: object) -> MomentumContrast:
    torch.manual_seed(0)
    parts = build_trunk("small_resnet", resolution=32)
    config = PretrainConfig.model_validate({"method": "moco", "queue": 6, "key_size": 8, **settings})
    return MomentumContrast(TrunkAndTail(Trunk(parts), parts.tail), parts.dim, config)


def views() -> tuple[Tensor, Tensor]:
    first, second = torch.randint(0, 256, (2, 4, 3, 32, 32), generator=torch.Generator().manual_seed(1)).byte()
    return first, second


def test_only_the_query_learns_and_the_key_follows() -> None:
    moco = small(key_momentum=0.5).train()
    moco(*views())  # the queue is empty before
    moco(*views()).loss.backward()
    learning = (moco.network, moco.head)
    assert all(weight.grad is not None for part in learning for weight in part.parameters())
    assert all(weight.grad is None for part in (moco.key_network, moco.key_head) for weight in part.parameters())
    before = moco.key_head[0].weight.clone()
    with torch.no_grad():
        moco.head[0].weight += 1.0
    moco(*views())
    torch.testing.assert_close(moco.key_head[0].weight, before + 0.5)
    assert moco.network.trunk.stages.training and moco.key_network.trunk.stages.training


def test_keys_of_the_second_view_join_the_queue() -> None:
    moco = small().train()
    first, second = views()
    result = moco(first, second)
    assert (result.loss.item(), result.accuracy.item()) == (0.0, 1.0)  # nothing to compare with yet
    twin = small().train()
    keys = normalize(twin.key_head(twin.key_network(second)))
    torch.testing.assert_close(moco.queue.filled, keys)
    moco(first, second)
    assert len(moco.queue.filled) == 6 and int(moco.queue.pushed) == 8


def test_the_network_learns_to_find_an_image_among_others() -> None:
    moco = small(queue=64, key_momentum=0.99).train()
    optimizer = torch.optim.SGD([weight for weight in moco.parameters() if weight.requires_grad], 0.03)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(60):
        patches = torch.randint(0, 256, (8, 3, 4, 4), generator=generator)
        images = patches.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
        noise = torch.randint(-80, 81, (2, *images.shape), generator=generator)
        result = moco(*(images + noise).clamp(0, 255).byte())
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        losses.append(result.loss.item())
    # The queue is full from the eighth step on; a guess among 65 keys costs log 65, and so does the untrained network.
    assert sum(losses[-10:]) / 10 < 0.8 * math.log(65)
    assert sum(losses[-10:]) < 0.9 * sum(losses[10:20])
