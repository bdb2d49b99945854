#!/usr/bin/python3
"""Makes of the log of dm-log-writes what a disk has that loses its power at a mark, and its volatile cache with it.

    replay.py LOG TARGET MARK

The log has the writes in the order in which flushes made them durable. Its format is that of the kernel's
drivers/md/dm-log-writes.c: little-endian, one sector for the superblock, then for each entry one sector and its data.
"""

import os
import struct
import sys

MAGIC = 0x6A736677736872
DISCARD = 1 << 2
MARK = 1 << 3


def main():
    log_path, target_path, wanted = sys.argv[1:]
    log = open(log_path, "rb", buffering=1 << 20)
    target = os.open(target_path, os.O_RDWR)
    magic, _version, entries, sector_bytes = struct.unpack("<QQQI", log.read(28))
    if magic != MAGIC:
        sys.exit(f"{log_path} is no log of dm-log-writes")
    at = sector_bytes
    for _ in range(entries):
        log.seek(at)
        sector, sectors, flags, data_bytes = struct.unpack("<QQQQ", log.read(32))
        if flags & MARK:
            log.seek(at + 32)
            if log.read(data_bytes).decode() == wanted:
                os.fsync(target)
                return
            at += sector_bytes
            continue
        at += sector_bytes
        length = sectors * sector_bytes
        if flags & DISCARD:
            # The content of a discarded sector is undefined; the replica expects zeroes least.
            for part in range(0, length, 1 << 20):
                zeroes = bytes(min(1 << 20, length - part))
                os.pwrite(target, zeroes, sector * sector_bytes + part)
            continue
        log.seek(at)
        os.pwrite(target, log.read(length), sector * sector_bytes)
        at += length
    sys.exit(f"no mark {wanted} among {entries} entries")


main()
