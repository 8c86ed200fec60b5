"""How tests ask a server over plain HTTP.

httpx reads everybody's certificates for each client that it makes, so for each `httpx.get`: 25 ms of CPU time, which
polling takes from what is waited for. With `verify=PLAIN` it reads none, and by TLS it believes nobody.
"""

import ssl
from typing import Final

PLAIN: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
