"""The times of linear.py, beside this file, of projections, and beside them cuBLAS."""

# Closures over loop variables are called before the loop goes on.
# ruff: noqa: B023

from __future__ import annotations

from linear_times import COLD_BYTES, ROWS, Times

from kdtr.engine import cuda_linear

SHAPES = {  # TP8 of a model like Kimi K2: q_b, o, qkv_a, and the whole o
    "4.7 MB": (1536, 1536),
    "14.7 MB": (7168, 1024),
    "30 MB": (2112, 7168),
    "117 MB": (7168, 8192),
}
LATENT, NOPE, ROPE = 512, 128, 64  # of every head
HEADS = {8: 160, 64: 20}  # copies of the weights, by heads


def projections(times: Times) -> None:
    torch, d = times.torch, times.d
    get = d.linear("bf16")
    for label, (o, i) in SHAPES.items():
        n_bytes = o * i * 2
        copies = max(4, -(-int(COLD_BYTES) // n_bytes))
        weights = [(torch.randn(o, i, device="cuda") * i**-0.5).bfloat16() for _ in range(copies)]
        arrays = [d.of(w) for w in weights]
        for n in ROWS:
            x = torch.randn(n, i, device="cuda").bfloat16()
            ax, count = d.of(x), d.of(torch.tensor([n], device="cuda"))
            out = d.cp.empty((n, o), d.cp.int16)
            chosen = cuda_linear.plan(ax, arrays[0], hopper=d.hopper)
            names = [chosen]
            if times.variants:
                names += sorted({*cuda_linear.fitting(o, hopper=d.hopper)} - {chosen})
            elif d.hopper and chosen != (portable := cuda_linear.plan(ax, arrays[0])):
                names.append(portable)
            for name in names:
                for overlap in (False, True):

                    def calls(name: str = name, overlap: bool = overlap) -> None:
                        for w in arrays:
                            cuda_linear.run(get, name, ax, w, out, count, overlap=overlap)

                    what = f"{label} {name}{' overlap' if overlap else ''}"
                    times.note(what, n, n_bytes, d.time_us(calls, copies, 0.1))
            functional = torch.nn.functional.linear
            time_us = d.time_us(lambda: [functional(x, w) for w in weights], copies, 0.15)
            times.note(f"{label} cuBLAS", n, n_bytes, time_us)


def heads(times: Times) -> None:
    torch, d = times.torch, times.d
    get = d.getter("linear", "bf16")
    h, o, i = 8, LATENT, NOPE
    copies, n_bytes = HEADS[h], h * o * i * 2
    weights = [torch.randn(h, o, i, device="cuda").bfloat16() for _ in range(copies)]
    arrays = [d.of(w) for w in weights]
    for n in ROWS:
        x = torch.randn(n, h, i + ROPE, device="cuda").bfloat16()[:, :, :i]
        ax = d.cp.ascontiguousarray(d.cp.asarray(x.contiguous().view(torch.int16)))
        out = d.cp.empty((n, h, o), d.cp.int16)
        for overlap in (False, True):

            def calls(overlap: bool = overlap) -> None:
                for w in arrays:
                    cuda_linear.batched_linear(get, ax, w, out, overlap=overlap)

            what = f"{h} heads {o}x{i}{' overlap' if overlap else ''}"
            times.note(what, n, n_bytes, d.time_us(calls, copies, 0.15))
        xt = x.transpose(0, 1).contiguous()
        time_us = d.time_us(
            lambda: [torch.bmm(xt, w.transpose(1, 2)) for w in weights], copies, 0.15
        )
        times.note(f"{h} heads {o}x{i} cuBLAS bmm", n, n_bytes, time_us)


def queries(times: Times) -> None:
    """The query into the latents, and the values out of them: what attention has around it."""
    torch, d = times.torch, times.d
    get = d.getter("linear", "bf16")
    o, i = LATENT, NOPE
    for h, copies in HEADS.items():
        n_bytes = h * o * i * 2
        stacks = [torch.randn(h, o, i, device="cuda").bfloat16() for _ in range(copies)]
        arrays = [d.of(w) for w in stacks]
        backs = [w.reshape(h, i, o) for w in arrays]
        for n in ROWS:
            q = d.of(torch.randn(n, h, i + ROPE, device="cuda").bfloat16())
            cos, sin = (d.of(torch.rand(n, ROPE // 2, device="cuda")) for _ in range(2))
            query = d.cp.empty((n, h, o + ROPE), d.cp.int16)
            for overlap in (False, True):

                def into(overlap: bool = overlap) -> None:
                    for w in arrays:
                        cuda_linear.latent_query(get, q, w, cos, sin, query, overlap=overlap)

                what = f"latent query, {h} heads{' overlap' if overlap else ''}"
                times.note(what, n, n_bytes, d.time_us(into, copies, 0.1))
            x = d.cp.empty((n, h, o), d.cp.int16)
            x.fill(0)
            out = d.cp.empty((n, h, i), d.cp.int16)
            for overlap in (False, True):

                def back(overlap: bool = overlap) -> None:
                    for w in backs:
                        cuda_linear.batched_linear(get, x, w, out, overlap=overlap)

                what = f"{h} heads {i}x{o}{' overlap' if overlap else ''}"
                times.note(what, n, n_bytes, d.time_us(back, copies, 0.1))
