"""Conversion of any module: its promises on small models, and refusals before the work."""

import copy

import pytest
import torch
from torch import nn

from phantom_parallel import PhantomLinear, convert
from phantom_parallel.conversion.api import (
    _RIDGES,
    GhostCurve,
    _best_ridge,
    find_layers,
    ghosts_for_budget,
    next_token_loss,
    output_importance,
)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 36), nn.GELU(), nn.Linear(36, 24), nn.Tanh(), nn.Linear(24, 12)).double()


def rows(count: int = 400, size: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(size, size, generator=generator, dtype=torch.float64) * (1 + torch.arange(size)) ** -1.0
    return torch.randn(count, size, generator=generator, dtype=torch.float64) @ mixing.T + 0.5


def difference(model: nn.Module, dense: nn.Module, x: torch.Tensor) -> float:
    return float((model(x) - dense(x)).detach().square().mean().sqrt() / dense(x).detach().std())


def test_the_error_falls_with_ghosts_to_none_at_full_rank():
    dense, x, errors = network(), rows(), []
    for ghosts in (1, 3, 6):
        model = copy.deepcopy(dense)
        report = convert(model, [x], blocks=3, ghosts=ghosts)
        errors.append(difference(model, dense, x))
        assert [len(group.layers) for group in report.groups] == [1, 1, 1]
        assert isinstance(model[2], PhantomLinear)
        assert sum(group.multiply_adds for group in report.groups) == sum(
            m.layout.weights for m in model if isinstance(m, PhantomLinear)
        )
    assert errors == sorted(errors, reverse=True)
    model = copy.deepcopy(dense)
    convert(model, [x], blocks=3, ghosts={"0": 8, "2": 12, "4": 8})
    assert difference(model, dense, rows(50)) < 1e-6
    assert errors[-1] > 1e-3


def test_sequential_conversion_beats_layers_converted_each_on_its_own():
    dense, x = network(), rows()
    together, apart = copy.deepcopy(dense), copy.deepcopy(dense)
    convert(together, [x[:200], x[200:]], blocks=3, ghosts=2)
    inputs = x
    for index, layer in enumerate(dense):
        if isinstance(layer, nn.Linear):
            covariance = inputs.T @ inputs / len(inputs)
            apart[index] = PhantomLinear.from_dense(layer, blocks=3, ghosts=2, covariance=covariance.detach())
        inputs = layer(inputs)
    assert difference(together, dense, x) < difference(apart, dense, x)


class Block(nn.Module):
    """A residual block with two maps on one input, as gate and up are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.gate, self.up, self.down_proj = nn.Linear(24, 48), nn.Linear(24, 48), nn.Linear(48, 24, bias=False)

    def forward(self, x, scale=1.0):
        y = self.norm(x)
        return x + self.down_proj(torch.sigmoid(self.gate(y)) * self.up(y)) * scale


class Residual(nn.Module):
    def __init__(self, depth: int = 3, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.scale = nn.ModuleList(Block() for _ in range(depth)), scale
        self.head = nn.Linear(24, 7)
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=self.scale)
        return self.head(x)


def test_maps_that_share_an_input_share_ghosts_and_the_stream_is_corrected():
    dense, x = Residual(), rows()
    model = copy.deepcopy(dense)
    report = convert(model, [x[:200], x[200:]], blocks=4, ghosts=2)
    assert [group.layers for group in report.groups[:2]] == [("blocks.0.gate", "blocks.0.up"), ("blocks.0.down_proj",)]
    assert [group.corrected for group in report.groups] == [False, True] * 3
    gate, up = model.blocks[0].gate, model.blocks[0].up
    torch.testing.assert_close(gate.compress, up.compress, atol=0, rtol=0)
    assert isinstance(model.head, nn.Linear)  # excluded by default
    # Where the writer is scaled afterwards, its output is not what is added: nothing is corrected, and nothing breaks.
    scaled = Residual(scale=0.5)
    assert not any(group.corrected for group in convert(scaled, [x], blocks=4, ghosts=2).groups)


def test_a_budget_gives_each_map_its_own_ghosts_and_is_kept():
    dense, x = Residual(), rows()
    report = convert(copy.deepcopy(dense), [x], blocks=4, budget=0.6)
    assert 0.5 < report.kept <= 0.6
    assert len(set(report.ghosts.values())) > 1
    assert report.ghosts["blocks.0.gate"] == report.ghosts["blocks.0.up"]
    second = convert(copy.deepcopy(dense), [x], blocks=4, budget=0.6, include=("blocks.1.*",))
    assert [group.layers[0] for group in second.groups] == ["blocks.1.gate", "blocks.1.down_proj"]


def test_ghosts_go_where_the_error_falls_most():
    steep, flat = GhostCurve(64, 64, 2.0 ** -torch.arange(16.0)), GhostCurve(64, 64, torch.full((16,), 1e-6))
    actual = ghosts_for_budget({"steep": steep, "flat": flat}, 4, 0.5)
    assert actual["steep"] > actual["flat"]
    used = steep.cost(4, actual["steep"]) + flat.cost(4, actual["flat"])
    assert used <= 0.5 * 2 * 64 * 64
    with pytest.raises(ValueError, match="blocks=2 and the fewest ghosts keep"):
        ghosts_for_budget({"steep": steep}, 2, 0.3)


def test_an_interrupted_conversion_continues_to_the_same_model(tmp_path):
    dense, x = Residual(), rows()
    whole = copy.deepcopy(dense)
    expected = convert(whole, [x], blocks=4, budget=0.6)

    class Stopped(Exception):
        pass

    def stop_at(kind, steps):
        def progress(step, done):
            steps.append(step)
            if step.startswith(f"{kind} blocks.2"):
                raise Stopped

        return progress

    measured, seen = [], []
    for kind, steps in (("measuring", measured), ("converting", seen)):
        with pytest.raises(Stopped):
            convert(copy.deepcopy(dense), [x], blocks=4, budget=0.6, folder=tmp_path, progress=stop_at(kind, steps))
    assert any(step.startswith("measuring blocks.1") for step in measured)
    assert not any(step.startswith("measuring blocks.1") for step in seen)
    steps, shares = [], []
    model = copy.deepcopy(dense)
    report = convert(
        model, [x], blocks=4, budget=0.6, folder=tmp_path, progress=lambda *a: (steps.append(a[0]), shares.append(a[1]))
    )
    assert steps == ["converting blocks.2.gate", "converting blocks.2.down_proj", "converted"]
    assert shares[0] > 0.6  # of the whole work
    assert shares[-1] == 1
    assert report.ghosts == expected.ghosts
    torch.testing.assert_close(model(x), whole(x), atol=1e-9, rtol=1e-9)
    (stored,) = tmp_path.glob("blocks.1-*")
    stored.write_bytes(b"damaged")
    again = copy.deepcopy(dense)
    convert(again, [x], blocks=4, budget=0.6, folder=tmp_path)
    torch.testing.assert_close(again(x), whole(x), atol=1e-9, rtol=1e-9)


def pretrained(kind: str, **settings):
    """A small model of transformers whose weights have been enlarged, so that its layers differ from the identity."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(kind, **{"vocab_size": 60} | sizes | settings)
    model = (transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM).from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    return model


def tokens_and_padded(padding: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens = torch.randint(60, (6, 40), generator=torch.Generator().manual_seed(0))
    padded = {"input_ids": torch.cat([tokens, torch.zeros(6, padding, dtype=torch.long)], 1)}
    return tokens, padded | {"attention_mask": (torch.arange(40 + padding) < 40).long().expand(6, -1)}


def test_padding_is_neither_data_nor_important():
    dense, actual = pretrained("bert"), []
    tokens, padded = tokens_and_padded(200)
    for batch in ({"input_ids": tokens}, padded):
        model = copy.deepcopy(dense)
        report = convert(model, [batch], blocks=4, ghosts=2, exclude=("pooler*",))
        assert report.rows == 240
        actual.append(model(tokens).last_hidden_state.detach())
    torch.testing.assert_close(actual[1], actual[0], atol=1e-3, rtol=1e-3)
    model = pretrained("llama", num_hidden_layers=1)
    layers = find_layers(model, ("*",), ("lm_head",))
    plain, masked = (output_importance(model, layers, [b], next_token_loss) for b in tokens_and_padded(20))
    for name, values in plain.items():
        torch.testing.assert_close(masked[name], values, atol=0, rtol=1e-3)


def test_loaders_and_datasets_are_calibration_data():
    """A dataset's rows are padded, with a mask, and its other columns are left out."""
    transformers = pytest.importorskip("transformers")
    dense, (tokens, _) = pretrained("llama", num_hidden_layers=1), tokens_and_padded(0)
    rows = [{"input_ids": row[: 40 - i].tolist(), "text": "not used"} for i, row in enumerate(tokens)]
    full = {"input_ids": tokens, "attention_mask": (torch.arange(40) < torch.arange(40, 34, -1)[:, None]).long()}
    loader = torch.utils.data.DataLoader([{name: value[i] for name, value in full.items()} for i in range(6)], 6)
    actual = []
    for data in ([full], loader, [transformers.BatchEncoding(full)], rows):
        model = copy.deepcopy(dense)
        assert convert(model, data, blocks=4, ghosts=2).rows == 6 * 40 - 15
        actual.append(model(tokens[:, :35]).logits.detach())
    for logits in actual[1:]:
        torch.testing.assert_close(logits, actual[0])


def test_layers_outside_the_stages_are_converted_and_named():
    dense = pretrained("bert")
    tokens = torch.randint(60, (60, 8), generator=torch.Generator().manual_seed(0))
    full = {name: m.in_features // 4 for name, m in dense.named_modules() if isinstance(m, nn.Linear)}
    errors, steps = [], []
    for ghosts in (1, full):
        model = copy.deepcopy(dense)
        report = convert(model, [tokens], blocks=4, ghosts=ghosts, progress=lambda step, done: steps.append(step))
        assert report.unstaged == ("pooler.dense",)
        assert steps[-2] == "converting pooler.dense"
        assert any(group.corrected for group in report.groups) is False  # BERT normalizes after the addition
        errors.append(float((model(tokens).pooler_output - dense(tokens).pooler_output).detach().norm()))
    assert errors[1] < 1e-3 < errors[0]


def test_bad_input_is_refused_before_the_model_changes():
    x = rows()
    cases = [
        ({"blocks": 5, "ghosts": 1}, x, "0: blocks=5 does not divide"),
        ({"blocks": 3, "ghosts": 9}, x, "ghosts=9 is larger"),
        ({"blocks": 3}, x, "either ghosts or a budget"),
        ({"blocks": 3, "budget": 1.5}, x, "between 0 and 1"),
        ({"blocks": 3, "ghosts": {"0": 2}}, x, "no number for 2"),
        ({"blocks": 3, "ghosts": 2, "include": ("none*",)}, x, "no linear layer"),
        ({"blocks": 3, "ghosts": 2}, x[:20], "20 rows, too few"),
        ({"blocks": 3, "ghosts": 2}, x.log(), "not finite"),
    ]
    for settings, data, message in cases:
        model = network()
        with pytest.raises(ValueError, match=message):
            convert(model, [data], **settings)
        assert all(not isinstance(module, PhantomLinear) for module in model)
    model = network()
    model[2].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="2 has weights that are not finite"):
        convert(model, [x], blocks=3, ghosts=2)
    with pytest.raises(ValueError, match="the covariance of the inputs of 0 on the calibration data is not finite"):
        convert(network(), [1e200 * x], blocks=3, ghosts=2)
    tied = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)).double()
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="shares its weight"):
        convert(tied, [x], blocks=3, ghosts=2)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_transformers_convert(kind):
    dense, tokens = pretrained(kind), tokens_and_padded(0)[0]
    full = {name: m.weight.shape[0 if kind == "gpt2" else 1] // 4 for name, m in dense.named_modules()
            if type(m).__name__ in ("Conv1D", "Linear") and name != "lm_head"}  # fmt: skip
    errors = []
    for ghosts in (1, 3, full):
        model = copy.deepcopy(dense)
        report = convert(model, [tokens[:3], {"input_ids": tokens[3:]}], blocks=4, ghosts=ghosts)
        assert [group.corrected for group in report.groups] == [False, True] * 4
        difference = model(tokens).logits - dense(tokens).logits
        errors.append(float(difference.detach().norm() / dense(tokens).logits.detach().norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4


def test_stages_of_another_model_or_of_other_data_are_not_used(tmp_path):
    dense, x = Residual(), rows()
    convert(copy.deepcopy(dense), [x[:150], x[150:]], blocks=4, ghosts=2, folder=tmp_path)
    other = copy.deepcopy(dense)
    with torch.no_grad():
        list(other.parameters())[-1].mul_(2)  # of the last layer alone
    for changed, batches in ((other, [x[:150], x[150:]]), (dense, [x[:150], 2 * x[150:]])):
        expected, actual = copy.deepcopy(changed), copy.deepcopy(changed)
        convert(expected, batches, blocks=4, ghosts=2)
        convert(actual, batches, blocks=4, ghosts=2, folder=tmp_path)
        torch.testing.assert_close(actual(x), expected(x), atol=1e-9, rtol=1e-9)


def test_the_correction_is_damped_as_the_other_half_of_the_data_asks_for():
    x = rows(80)
    torch.manual_seed(1)
    y = x @ torch.randn(x.shape[1], 5, dtype=torch.float64) * 0.3 + torch.randn(80, 5, dtype=torch.float64) + 2
    importance = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    halves = [
        [a.T @ a, b.T @ a, a.sum(0), b.sum(0), 0.0, 0.0, len(a)] for a, b in zip(x.chunk(2), y.chunk(2), strict=True)
    ]
    (a, other_a), (b, other_b) = ([half - half.mean(0) for half in values.chunk(2)] for values in (x, y))
    errors = {}
    for ridge in _RIDGES:  # least squares of more rows: sqrt(ridge) I with the target 0
        damping = (ridge * len(a) * (a.square().mean(0).mean())).sqrt() * torch.eye(a.shape[1], dtype=a.dtype)
        weight = torch.linalg.lstsq(torch.cat([a, damping]), torch.cat([b, b.new_zeros(len(damping), 5)])).solution
        errors[ridge] = float(((other_b - other_a @ weight).square() * importance).sum())
    best = min(errors, key=errors.__getitem__)
    assert 1e-6 < best < 1e4
    assert _best_ridge(halves, importance, centred=True) == best / 2


def test_the_reported_error_is_that_of_the_outputs_on_the_calibration_data():
    dense, x = network(), rows(100)
    model = copy.deepcopy(dense)
    report = convert(model, [x[:60], x[60:]], blocks=3, ghosts=2)
    for group, size in zip(report.groups, (1, 3, 5), strict=True):
        y, actual = dense[:size](x).detach(), model[:size](x).detach()
        assert group.relative_error == pytest.approx(float((actual - y).norm() / y.norm()), rel=1e-6)
