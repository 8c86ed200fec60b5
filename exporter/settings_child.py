"""The process that reads the exporter's settings, and ends: its memory, 10 MiB of it pydantic's, ends with it.

`python -m exporter.settings_child NUMBER OPTION…`: NUMBER is an open file, to which it writes the values, by name, as
a pickled dict: paths stay paths so, and what several options gave a tuple. It exits with 0 then, and also where nobody
is to go on, as after `--help`: nothing is written then. What is wrong is told on standard error, and it exits with 2.
"""

import os
import pickle
import sys

from gpuwarden.loading import loading

with loading():
    from pydantic import ValidationError

    from exporter.settings import Settings
    from gpuwarden.settings import complaints, given


def main(argv: list[str]) -> int:
    """Read the options after the number of the file, and the environment; returns the exit status."""
    to, *options = argv
    try:
        settings = given(Settings, options)
    except ValidationError as error:
        for line in complaints(error, Settings):
            print(f"gpuwarden exporter: error: {line}", file=sys.stderr)
        return 2
    with os.fdopen(int(to), "wb") as values:
        pickle.dump(dict(settings), values)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
