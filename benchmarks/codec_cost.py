"""What does each codec cost a core, for 25 million numbers?

    python benchmarks/codec_cost.py [--numbers 25000000] [--codecs "threshold(density=0.001)" ...]

One process, one thread. Gradients are Gaussian, a stock of numbers read from another place for every message, so that
residuals do a random walk; `threshold` first takes `--settle` messages, in which its density comes to rest.
Milliseconds are of this thread's processor time, the median of `--repeats` messages, so they mean something on a busy
machine too (caches and memory are still shared); beside them, the least time in which the core reads as much, adds it
to a residual and does nothing else.
"""

from __future__ import annotations

import statistics
import time

import torch
from measuring.common import machine, make_parser, table, write_row
from measuring.measurement import CODECS, Command, Measurement

from mpitrain.codecs import Part, add_message
from mpitrain.model.wire.codec_registry import make_encoder, make_layout_of
from mpitrain.values import parse

MEASUREMENT = Measurement(
    bound="one pass that reads as much and adds it to a residual",
    depends=CODECS,
    figures=("codecs.*.encode_ms", "codecs.*.decode_ms"),
    commands=(Command("python benchmarks/codec_cost.py", minutes=10),),
)

CODECS = ["float16", "bfloat16", "eightbit", "qsgd", "onebit", "powersgd", "topk", "threshold"]
ROW = 1 << 20  # numbers of a parameter


def gradient(stock, numbers, message):
    first = message * 7919 % (len(stock) - numbers + 1)
    return stock[first : first + numbers]


def measure(text, stock, layout, options):
    encoder = make_encoder(parse(text, "codec"))
    encode_s, decode_s = [], []
    sums = torch.zeros(options.numbers)
    settle = options.settle if text.startswith("threshold") else 2
    for number in range(settle + options.repeats):
        parts = [Part(gradient(stock, options.numbers, number), layout)]
        began_s = time.thread_time()
        message = encoder.encode(parts)
        encoded_s = time.thread_time()
        if number >= settle:
            add_message(message, [Part(sums, layout)], 0.25)
            encode_s.append(encoded_s - began_s)
            decode_s.append(time.thread_time() - encoded_s)
    return {
        "encode_ms": 1e3 * statistics.median(encode_s), "decode_ms": 1e3 * statistics.median(decode_s),
        "message_bytes": message.numel(), "density": encoder.last["density"],
    }  # fmt: skip


def pass_ms(stock, options):
    """One pass over gradient and residual, with nothing made of it."""
    residual, took_s = torch.zeros(options.numbers), []
    for number in range(options.repeats):
        began_s = time.thread_time()
        residual.add_(gradient(stock, options.numbers, number))
        took_s.append(time.thread_time() - began_s)
    return 1e3 * min(took_s)


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--numbers", type=int, default=25_000_000)
    parser.add_argument("--settle", type=int, default=100)
    parser.add_argument("--rounds", "--repeats", dest="repeats", type=int, default=9)
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    stock = torch.randn(options.numbers + ROW, generator=generator)
    sizes = [ROW] * (options.numbers // ROW) + [options.numbers % ROW]
    layout = make_layout_of(
        (f"w{i}", (1024, size // 1024) if size == ROW else (size,)) for i, size in enumerate(sizes) if size
    )
    least = pass_ms(stock, options)
    rows, record = [("codec", "encode ms", "decode ms", "message", "density", "times the pass")], {}
    for text in options.codecs:
        record[text] = one = measure(text, stock, layout, options)
        rows.append(
            (text, f"{one['encode_ms']:.1f}", f"{one['decode_ms']:.1f}", f"{one['message_bytes'] / 1e3:.0f} kB",
             f"{one['density']:.4f}", f"{one['encode_ms'] / least:.1f}")
        )  # fmt: skip
    print(f"{machine()['cpu']}, {options.numbers / 1e6:.1f} million numbers; a pass takes {least:.1f} ms")
    print(table(rows), flush=True)
    row = {"numbers": options.numbers, "pass_ms": least, "codecs": record}
    write_row("codec_cost", row)


if __name__ == "__main__":
    main()
