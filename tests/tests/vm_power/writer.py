#!/usr/bin/python3
"""Writes what a power cut must not lose, and checks later that it is there.

    writer.py write device|files PATH SEED     prints N when round N is durable; where MARK is set in the
                                               environment, it marks round N in the log of that
                                               dm-log-writes device before
    writer.py check device|files PATH SEED N   round N was durable
"""

import os
import random
import subprocess
import sys

BLOCKS = 2048
BLOCK_BYTES = 4096
SECTOR_BYTES = 512
BLOCKS_PER_ROUND = 8
FILES = 150
# Rounds that may have been under way, or durable without a report.
UNHEARD_ROUNDS = 2000


def blocks_of_rounds(seed):
    """The blocks of round 1, 2, ... on a device."""
    source = random.Random(seed)
    while True:
        yield [source.randrange(BLOCKS) for _ in range(BLOCKS_PER_ROUND)]


def sector(number, block):
    return b"%015x %015x\n" % (number, block) * (SECTOR_BYTES // 32)


def offset(seed, block):
    """Every seed has a part of the device of its own."""
    return (seed * BLOCKS + block) * BLOCK_BYTES


def tell(number):
    if "MARK" in os.environ:
        subprocess.run(["dmsetup", "message", os.environ["MARK"], "0", "mark", str(number)], check=True)
    print(number, flush=True)


def write_device(path, seed):
    device = os.open(path, os.O_RDWR)
    for number, blocks in enumerate(blocks_of_rounds(seed), 1):
        for block in blocks:
            content = sector(number, block) * (BLOCK_BYTES // SECTOR_BYTES)
            os.pwrite(device, content, offset(seed, block))
        os.fsync(device)
        tell(number)


def check_device(path, seed, heard):
    # By block, every round that has written it, in order.
    rounds = {block: [0] for block in range(BLOCKS)}
    for number, blocks in zip(range(1, heard + UNHEARD_ROUNDS), blocks_of_rounds(seed)):
        for block in blocks:
            rounds[block].append(number)
    device = os.open(path, os.O_RDONLY)
    for block, numbers in rounds.items():
        last = max(number for number in numbers if number <= heard)
        allowed = {bytes(SECTOR_BYTES) if number == 0 else sector(number, block)
                   for number in numbers if number >= last}
        content = os.pread(device, BLOCK_BYTES, offset(seed, block))
        for at in range(0, BLOCK_BYTES, SECTOR_BYTES):
            found = content[at:at + SECTOR_BYTES]
            if found not in allowed:
                sys.exit(f"block {block}, byte {at}: round {last} was durable (heard {heard}), found {found[:32]}")


def file_content(seed, number):
    source = random.Random((seed << 32) + number)
    return source.randbytes(source.randrange(1, 64 << 10))


def write_files(path, seed):
    folder = os.open(path, os.O_DIRECTORY)
    number = 0
    while True:
        number += 1
        new = os.path.join(path, f"new-{seed}")
        with open(new, "wb") as file:
            file.write(file_content(seed, number))
            file.flush()
            os.fsync(file.fileno())
        os.rename(new, os.path.join(path, f"{seed}-{number % FILES}"))
        os.fsync(folder)
        tell(number)


def check_files(path, seed, heard):
    for last in range(max(1, heard - FILES + 1), heard + 1):
        with open(os.path.join(path, f"{seed}-{last % FILES}"), "rb") as file:
            found = file.read()
        later = range(last, heard + UNHEARD_ROUNDS, FILES)
        if not any(found == file_content(seed, number) for number in later):
            sys.exit(f"file {last % FILES}: round {last} was durable (heard {heard}), found {len(found)} other bytes")


def main():
    action, kind, path, seed = sys.argv[1:5]
    functions = {
        ("write", "device"): write_device,
        ("check", "device"): check_device,
        ("write", "files"): write_files,
        ("check", "files"): check_files,
    }
    functions[action, kind](path, int(seed), *map(int, sys.argv[5:]))


main()
