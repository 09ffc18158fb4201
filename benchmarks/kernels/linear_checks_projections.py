"""The checks of linear.py, beside this file, of projections: against float64, and bit for bit.

Rows that do not count are NaN and must stay unwritten; every kernel that fits must give the same
bits, and a row alone the bits that it has among others.
"""

from __future__ import annotations

from linear_checks import Checks

from kdtr.engine import cuda_linear

# n, o, i
SHAPES = (
    *((1, 16, 32), (1, 1536, 1536), (3, 17, 40), (17, 100, 264), (25, 130, 520)),
    *((65, 2112, 7168), (129, 300, 256), (5, 7, 9), (200, 50, 24), (33, 4100, 1024)),
    *((24, 4096, 136), (40, 4097, 8), (66, 257, 1032), (8, 1, 8), (1, 1, 1), (70, 33, 100)),
    *((300, 4100, 512), (17, 7168, 1024), (2, 5000, 3000)),
)
# n, h, o, i
HEADS = ((1, 8, 512, 128), (17, 8, 512, 128), (65, 4, 128, 512), (5, 3, 20, 12))
# n, h, c, d, r
QUERIES = (
    *((1, 8, 512, 128, 64), (17, 8, 512, 128, 64), (65, 64, 512, 128, 64)),
    *((70, 3, 40, 24, 8), (6, 2, 33, 8, 0), (33, 4, 96, 200, 16)),
)


def projections(checks: Checks) -> None:
    for dtype in ("f32", "bf16"):
        for n, o, i in SHAPES:
            projection(checks, dtype, n, o, i)
        for n, h, o, i in HEADS:
            heads(checks, dtype, n, h, o, i)
    for n, h, c, d, r in QUERIES:
        query(checks, n, h, c, d, r)


def projection(checks: Checks, dtype: str, n: int, o: int, i: int) -> None:
    torch, d = checks.torch, checks.d
    get = d.linear(dtype)
    wide = checks.random(n, i + 24, dtype=dtype)
    x, w = wide[:, 8 : 8 + i], checks.random(o, i, dtype=dtype)
    rows = max(1, n - n // 3)
    x[rows:] = float("nan")
    count = d.of(torch.tensor([rows], device="cuda"))
    ax, aw = d.of(wide)[:, 8 : 8 + i], d.of(w)
    exact = x[:rows].double() @ w.double().T
    size = x[:rows].double().abs() @ w.double().abs().T
    names = {cuda_linear.plan(ax, aw, hopper=d.hopper)}
    if cuda_linear.fast(ax, aw):
        names |= set(cuda_linear.fitting(o, hopper=d.hopper))
    same = None
    for name in sorted(names):
        out = torch.full((n, o), 7.0, device="cuda").to(w.dtype)
        cuda_linear.run(get, name, ax, aw, d.of(out), count)
        label = f"{name} {dtype} n={n} o={o} i={i}"
        checks.close(label, out[:rows], exact, size, dtype)
        checks.expect(label + " padding", bool((out[rows:] == 7).all()))
        same = out[:rows] if same is None else same
        checks.expect(label + " same bits", torch.equal(same, out[:rows]))
    y = d.back(cuda_linear.linear(get, ax, aw, count, wgmma=d.wgmma(dtype)), dtype)
    checks.expect(f"linear {dtype} {n} {o} {i}", torch.equal(y[:rows], same))
    for row in (0, rows // 2, rows - 1):
        alone = d.back(cuda_linear.linear(get, ax[row : row + 1], aw), dtype)
        checks.expect(f"alone {dtype} {n} {o} {i}", torch.equal(y[row : row + 1], alone))


def heads(checks: Checks, dtype: str, n: int, h: int, o: int, i: int) -> None:
    torch, d = checks.torch, checks.d
    get = d.linear(dtype)
    q = checks.random(n, h, i + 64, dtype=dtype)
    w = checks.random(h, o, i, dtype=dtype)
    out = torch.zeros(n, h, o + 64, device="cuda").to(w.dtype)
    count = d.of(torch.tensor([n], device="cuda"))
    aq, a_out = d.of(q)[:, :, :i], d.of(out)[:, :, :o]
    cuda_linear.batched_linear(get, aq, d.of(w), a_out, count)
    x = q[:, :, :i].double()
    exact = torch.einsum("nhi,hoi->nho", x, w.double())
    size = torch.einsum("nhi,hoi->nho", x.abs(), w.double().abs())
    checks.close(f"batched {dtype} {n} {h} {o} {i}", out[:, :, :o], exact, size, dtype)
    checks.expect("batched rest", bool((out[:, :, o:] == 0).all()))
    few = torch.zeros_like(out)
    for row in range(n):
        one = slice(row, row + 1)
        cuda_linear.batched_linear(get, aq[one], d.of(w), d.of(few)[one, :, :o])
    checks.expect(f"batched alone {dtype} {n} {h}", torch.equal(few, out))


def query(checks: Checks, n: int, h: int, c: int, nope: int, r: int) -> None:
    """`latent_query`: w_kc's part of every head, and the rotated one beside it."""
    torch, d = checks.torch, checks.d
    get = d.getter("linear", "bf16")
    q = checks.random(n, h, nope + r, dtype="bf16")
    w = checks.random(h, c, nope, dtype="bf16", scale=nope**-0.5)
    angle = torch.rand(n, r // 2, device="cuda") * 6
    cos, sin = angle.cos(), angle.sin()
    rows = max(1, n - n // 3)
    q[rows:] = float("nan")
    found = torch.full((n, h, c + r), 7.0, device="cuda").bfloat16()
    count = d.of(torch.tensor([rows], device="cuda"))
    checks.expect("fast query", cuda_linear.fast_query(d.of(q), d.of(w)))
    tables = (d.cp.empty((n, 0), d.cp.float32),) * 2 if r == 0 else (d.of(cos), d.of(sin))
    cuda_linear.latent_query(get, d.of(q), d.of(w), *tables, d.of(found), count)
    x = q[:rows].double()
    exact = torch.einsum("nhi,hoi->nho", x[..., :nope], w.double())
    size = torch.einsum("nhi,hoi->nho", x[..., :nope].abs(), w.double().abs())
    label = f"latent query n={n} h={h} c={c}"
    checks.close(label, found[:rows, :, :c], exact, size, "bf16")
    first, second = x[..., nope : nope + r // 2], x[..., nope + r // 2 :]
    by_cos, by_sin = cos[:rows, None].double(), sin[:rows, None].double()
    turned = torch.cat((first * by_cos - second * by_sin, second * by_cos + first * by_sin), -1)
    if r:
        largest = first.abs() + second.abs()
        largest = torch.cat((largest, largest), -1)
        checks.close(label + " rope", found[:rows, :, c:], turned, largest, "bf16")
    checks.expect(label + " padding", bool((found[rows:] == 7).all()))
    alone = torch.zeros(1, h, c + r, device="cuda").bfloat16()
    last = slice(rows - 1, rows)
    its_cos, its_sin = (table[last] for table in tables)
    cuda_linear.latent_query(get, d.of(q)[last], d.of(w), its_cos, its_sin, d.of(alone))
    checks.expect(label + " alone", torch.equal(alone[0], found[rows - 1]))
