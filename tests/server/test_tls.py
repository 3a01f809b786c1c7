"""TLS: real handshakes with certificates made for the test."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from quire.errors import ConfigError
from quire.server.http.tls import POLL_S, CertificateWatch
from quire.server.launcher import make_server
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer, server_config
from tests.server.test_protocol import CHAT, HELLO, events

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


class Authority:
    """A certificate authority and what it signs."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self.certificate, self._key = directory / f"{name}-ca.pem", directory / f"{name}-ca.key"
        self._new_key(self._key)
        openssl("req", "-x509", "-new", "-key", str(self._key), "-out", str(self.certificate), "-days", "2",
                "-subj", f"/CN={name}")  # fmt: skip

    def sign(self, name: str) -> tuple[Path, Path]:
        """Certificate and key for the loopback, as `name`."""
        certificate, key, request = (self._directory / f"{name}.{end}" for end in ("pem", "key", "csr"))
        extensions = self._directory / "extensions"
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        self._new_key(key)
        openssl("req", "-new", "-key", str(key), "-out", str(request), "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self._key),
                "-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", str(certificate))  # fmt: skip
        return certificate, key

    def _new_key(self, key: Path) -> None:
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key))


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def files(ours) -> dict[str, str]:
    certificate, key = ours.sign("server")
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}


def trusting(authority: Authority, *chain: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if chain:
        context.load_cert_chain(*map(str, chain))
    return context


def url(server: RunningServer) -> str:
    return f"https://127.0.0.1:{server.port}"


def common_name(server: RunningServer, context: ssl.SSLContext) -> str:
    with (
        socket.create_connection(("127.0.0.1", server.port)) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as connection,
    ):
        return dict(pair[0] for pair in connection.getpeercert()["subject"])["commonName"]


def test_streams_go_through_tls_of_at_least_1_2(ours, files):
    with RunningServer(ScriptedEngine(), **files) as server:
        with httpx.Client(verify=trusting(ours)) as client:
            answer = client.post(url(server) + CHAT, json={**HELLO, "stream": True})
            assert events(answer)[-1]["choices"][0]["finish_reason"] == "length"
        assert server.server.address() == url(server)
        with pytest.raises(httpx.ConnectError):
            httpx.get(url(server) + "/live")  # the authority is not one of the system's
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            plain.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert not plain.recv(1000).startswith(b"HTTP")
        context = server.server.config.ssl
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert {one["protocol"] for one in context.get_ciphers()} <= {"TLSv1.2", "TLSv1.3"}


def test_clients_need_a_certificate_of_the_authorities_that_are_named(ours, files, tmp_path):
    theirs = Authority(tmp_path, "theirs")
    with RunningServer(ScriptedEngine(), ssl_ca_certs=str(ours.certificate), **files) as server:
        with httpx.Client(verify=trusting(ours, *ours.sign("client"))) as client:
            assert client.get(url(server) + "/live").status_code == 200
        for chain in ((), theirs.sign("client")):
            with httpx.Client(verify=trusting(ours, *chain)) as client, pytest.raises(httpx.TransportError):
                client.get(url(server) + "/live")


def test_a_certificate_that_may_be_shown_is_checked(ours, files, tmp_path):
    theirs = Authority(tmp_path, "theirs")
    settings = {"ssl_ca_certs": str(ours.certificate), "ssl_cert_reqs": 1, **files}
    with RunningServer(ScriptedEngine(), **settings) as server:
        with httpx.Client(verify=trusting(ours)) as client:
            assert client.get(url(server) + "/live").status_code == 200
        with httpx.Client(verify=trusting(ours, *theirs.sign("client"))) as client, pytest.raises(httpx.TransportError):
            client.get(url(server) + "/live")


def test_a_new_certificate_is_used_without_a_restart(ours, tmp_path):
    certificate, key = ours.sign("first")
    served = [tmp_path / "cert.pem", tmp_path / "key.pem"]
    shutil.copy(certificate, served[0])
    shutil.copy(key, served[1])
    settings = {"ssl_certfile": str(served[0]), "ssl_keyfile": str(served[1])}
    with RunningServer(ScriptedEngine(), **settings) as server:
        context = server.server.config.ssl
        watch = CertificateWatch(context, server_config(**settings).http)
        assert not watch.refresh() and common_name(server, trusting(ours)) == "first"
        certificate, key = ours.sign("second")
        shutil.copy(certificate, served[0])
        assert not watch.refresh(), "the key is still the old one"
        assert common_name(server, trusting(ours)) == "first"
        shutil.copy(key, served[1])
        assert watch.refresh() and not watch.refresh()
        assert common_name(server, trusting(ours)) == "second"
        os.unlink(served[1])
        assert not watch.refresh()
        assert common_name(server, trusting(ours)) == "second"


def test_enable_ssl_refresh_looks_at_the_files_by_itself(ours, tmp_path, monkeypatch):
    monkeypatch.setattr("quire.server.http.tls.POLL_S", POLL_S / 100)
    served = [tmp_path / "cert.pem", tmp_path / "key.pem"]
    for name in ("first", "second"):
        for source, target in zip(ours.sign(name), served, strict=True):
            shutil.copy(source, tmp_path / f"{name}-{target.name}")
    for target in served:
        shutil.copy(tmp_path / f"first-{target.name}", target)
    settings = {"ssl_certfile": str(served[0]), "ssl_keyfile": str(served[1]), "enable_ssl_refresh": True}
    with RunningServer(ScriptedEngine(), **settings) as server:
        assert common_name(server, trusting(ours)) == "first"
        for target in served:
            os.replace(tmp_path / f"second-{target.name}", target)
        server.wait_until(lambda: common_name(server, trusting(ours)) == "second")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"ssl_ca_certs": "x"}, "ssl_certfile"),
        ({"enable_ssl_refresh": True}, "ssl_certfile"),
        ({"ssl_cert_reqs": 2}, "ssl_certfile"),
        ({"ssl_ciphers": "HIGH"}, "ssl_certfile"),
    ],
    ids=["authorities", "refresh", "client certificates", "ciphers"],
)
def test_settings_of_tls_need_a_certificate(settings, field):
    with pytest.raises(ConfigError) as caught:
        make_server(ScriptedEngine(), server_config(**settings))
    assert caught.value.field == field and caught.value.hint


def test_checking_clients_needs_authorities_and_ciphers_must_exist(files):
    with pytest.raises(ConfigError, match="ssl_ca_certs"):
        make_server(ScriptedEngine(), server_config(ssl_cert_reqs=2, **files))
    with pytest.raises(ConfigError, match="ciphers"):
        make_server(ScriptedEngine(), server_config(ssl_ciphers="NO-SUCH-CIPHER", **files))
