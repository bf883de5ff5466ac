"""A surrogate for Darcy flow: train a phantom network on a mesh or a grid, and draw what it predicts.

    python examples/darcy.py --data darcy-mesh --steps 300 --out darcy.png

The network maps the coefficient of a porous medium at every point to the pressure there. Blocks are regions of the
domain, so that a rank would hold a region of the domain; see ``phantom train --data darcy-mesh --ranks 4`` for ranks.
"""

import argparse

import torch
from torch.nn.functional import mse_loss

from phantom_parallel import FFN, FFNConfig, parameter_groups
from phantom_parallel.families.ffn.fields import load_fields
from phantom_parallel.report.figures import draw_fields


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("darcy-mesh", "darcy"), default="darcy-mesh", help="on a mesh or on a grid")
    parser.add_argument("--grid", type=int, default=32, help="points along a side")
    parser.add_argument("--samples", type=int, default=5120, help="fields; one in eight is held out")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="darcy.png", help="picture to write")
    options = parser.parse_args()

    fields = load_fields(options.data, options.grid, options.samples, show=True)
    x, y = torch.from_numpy(fields.x), torch.from_numpy(fields.y)
    rows = options.samples - options.samples // 8
    torch.manual_seed(0)
    model = FFN(FFNConfig(options.grid**2, depth=3, blocks=8, ghosts=16, activation="gelu"))
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=2e-3))
    for step in range(options.steps):
        batch = torch.randint(rows, (128,))
        loss = mse_loss(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: error {loss.item():.3f} of the variance")
    with torch.no_grad():
        predicted = model(x[rows:])
    print(f"held out: error {mse_loss(predicted, y[rows:]).item():.4f} of the variance")

    # The first held-out field, in the units of the pressure.
    truth, guess = (fields.mean + fields.scale * values[0].numpy() for values in (y[rows:], predicted))
    known = {"pressure": truth, "coefficient": fields.x[rows]}
    draw_fields(fields.points, known, {"phantom": guess}).savefig(options.out, dpi=150)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
