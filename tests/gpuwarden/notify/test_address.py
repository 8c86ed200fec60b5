"""Addresses of notifications are checked, and shown without secrets."""

from argparse import ArgumentTypeError

import pytest

from gpuwarden.notify.address import AddressError, by_mail_server, check, from_argument, shown, without_secrets

pytestmark = pytest.mark.pure

SLACK = "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"


@pytest.mark.parametrize(
    ("address", "page"),
    [
        ("alice@example.com", "alice@example.com"),
        ("mailtos://u:p4ssword@smtp.example.com?from=a@b.c", "mailtos://smtp.example.com"),
        ("ntfys://ntfy.sh/secret-topic", "ntfys://ntfy.sh"),
        ("json://localhost:8080/token", "json://localhost"),
        (SLACK, "slack://"),
    ],
)
def test_a_valid_address_is_shown_without_secrets(address: str, page: str) -> None:
    assert check(address) == address
    assert shown(address) == page


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("", "1 to 500 printable"),
        ("x" * 501, "1 to 500 printable"),
        ("a@b.c\nBcc: x", "1 to 500 printable"),
        ("alice", "use one such as alice@example.com"),
        ("mailto:alice@example.com", "use one such as alice@example.com"),
        ("json://[::1", "use one such as"),
        ("dbus://secret", "dbus:// is not supported: use one of mailto, mailtos, slack"),
        ("slack://a/b/c?template=/etc/passwd", "the option 'template' of the slack:// address reads a file"),
        ("workflows://h/a/b/#x?template=/etc/passwd", "the option 'template' of the workflows:// address reads a file"),
        ("workflows://h/a/b?c=d;%74emplate=/etc/passwd", "the option 'template' of the workflows:// address"),
        ("workflows://h/a/b?c=d#x&template=/etc/passwd", "the option 'template' of the workflows:// address"),
        ("mailtos://u:pass#secret@smtp.example.com", "use one such as"),
        ("o'brien@example.com", "use one such as"),
        (".al@example.com", "use one such as"),
        ("al+@example.com", "use one such as"),
    ],
)
def test_an_invalid_address_is_refused_without_its_text(address: str, says: str) -> None:
    with pytest.raises(AddressError, match=says.replace("(", r"\(")) as error:
        check(address)

    assert "secret" not in str(error.value).replace("dbus://secret", "")
    assert "passwd" not in str(error.value)


def test_an_argument_is_checked_without_its_text() -> None:
    assert from_argument("alice@example.com") == "alice@example.com"
    with pytest.raises(ArgumentTypeError, match="use one such as") as error:
        from_argument("json://[::1/secret")

    assert "secret" not in str(error.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Apprise
def test_apprise_sends_to_the_whole_mail_address() -> None:
    apprise = pytest.importorskip("apprise")
    for sign in "!#$%&*+/=?^_`{|}~.-":
        address = check(f"a{sign}4b@example.com")
        target = apprise.Apprise.instantiate(by_mail_server(address, "mailtos://u:p@smtp.example.com?from=g@b.c"))
        assert target.targets == [(False, address)], address


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ("mailto://smtp", "mailto://smtp?to=a%2Bb@example.com"),
        ("mailto://smtp?from=x@y", "mailto://smtp?from=x@y&to=a%2Bb@example.com"),
    ],
)
def test_a_mail_address_becomes_a_recipient_of_the_mail_server(server: str, url: str) -> None:
    assert by_mail_server("a+b@example.com", server) == url


@pytest.mark.parametrize(
    ("text", "address", "without"),
    [
        ("cannot POST /services/T1JJ3T3L2/A1BRTD4JD", SLACK, "cannot POST /services/***/***"),
        (
            "bad p@ss of u at smtp.example.com",
            "mailtos://u:p%40ss@smtp.example.com",
            "bad *** of u at smtp.example.com",
        ),
        ("topic key99 at localhost", "ntfy://localhost/key99?auth=key99", "topic *** at localhost"),
        ("anything", "json://[::1", ""),
    ],
)
def test_an_error_repeats_no_part_of_the_address(text: str, address: str, without: str) -> None:
    assert without_secrets(text, address) == without


def test_an_address_that_is_no_url_is_not_shown() -> None:
    assert shown("json://[::1") == "an invalid address"
