"""One kernel text, three machines: Metal as it is, CUDA behind a prelude, and any device on which a test stands in.

machine.py      which of them a kernel runs on now
program.py      a kernel text with its constants, compiled once and launched
names.*.h       lane, barrier, sums and staging under Metal's names, for each machine
tiles.*.h       8-wide matrix tiles and their product, for each machine
tiles.h         loads and stores of those tiles, the same everywhere
lanes.h         rows spread over the lanes of a SIMD group, and sums of several at once
"""
