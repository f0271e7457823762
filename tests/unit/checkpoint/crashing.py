"""`Files` that stop at a chosen operation: killed before or in the middle of it, refused, or with the power cut."""

import errno
import os

from megatron_grpo.checkpoint.files import Files


class Killed(BaseException):
    """The process is gone: nothing after it runs, clean-up included."""


class CrashingFiles(Files):
    """Counts the operations; number `at` is cut off half-way, and every later one is never reached."""

    def __init__(self, at=None):
        self.at = at
        self.done = []
        self.synced = {}  # inode -> size that is certainly on the disk
        self.is_dead = False

    def _operation(self, name, path, run, half=None):
        if self.is_dead:
            raise Killed
        if len(self.done) == self.at:
            self.is_dead = True
            if half is not None:
                half()
            raise Killed(name)
        self.done.append((name, path))
        return run()

    def make_directory(self, path):
        self._operation("make_directory", path, lambda: super(CrashingFiles, self).make_directory(path))

    def write(self, path, data):
        def half():
            Files.write(self, path, data[: len(data) // 2])

        self._operation("write", path, lambda: Files.write(self, path, data), half)

    def sync(self, path):
        def run():
            Files.sync(self, path)
            self.synced[path.stat().st_ino] = path.stat().st_size

        self._operation("sync", path, run)

    def rename(self, source, target):
        self._operation("rename", source, lambda: Files.rename(self, source, target))

    def remove_tree(self, path):
        def half():
            for found in sorted(path.rglob("*"))[:1]:
                if found.is_file():
                    found.unlink()

        self._operation("remove_tree", path, lambda: Files.remove_tree(self, path), half)

    def digest(self, path):
        return self._operation("digest", path, lambda: Files.digest(self, path))

    def cut_power(self, root):
        """What was never synced is lost: such files are empty now."""
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_ino not in self.synced:
                os.truncate(path, 0)


class RefusingFiles(Files):
    """One kind of operation fails with an OSError, the others work."""

    def __init__(self, operation, number):
        self._error = OSError(number, os.strerror(number))
        setattr(self, operation, self._refuse)

    def _refuse(self, *_):
        raise self._error


DISK_FULL, READ_ONLY = errno.ENOSPC, errno.EROFS
