"""Write the reference pages of commands, alerts, the HTTP API and the gateway's metrics.

`--check` writes nothing and exits 1 if a page is outdated.
"""

import sys
from typing import Final

from gpuwarden.settings import write_pages
from testbed.check_release import CHECKOUT
from testbed.reference import alerts, cli, gateway, http_api

DOCS: Final = CHECKOUT / "docs" / "reference"


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or with `--check` compare them."""
    pages = {"cli.md": cli.page, "alerts.md": alerts.page, "http-api.md": http_api.page}
    pages["metrics-gateway.md"] = gateway.page
    about = (__doc__ or "").partition("\n")[0]
    return write_pages(pages, module="testbed.reference", about=about, docs=DOCS, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
