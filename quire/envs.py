"""Every environment variable Quire reads, in one place.

Read at call time, never at import. Settings belong in the config; these are for what must be known
before a config exists.
"""

from __future__ import annotations

import os
from pathlib import Path

from quire.errors import ConfigError, nearest

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LOG_FORMATS = ("text", "json")


def log_level(default: str = "INFO") -> str:
    """QUIRE_LOG_LEVEL, else VLLM_LOGGING_LEVEL: DEBUG, INFO, WARNING or ERROR; `default` when none is set.

    Raises:
        ConfigError: it is none of these.
    """
    for name in ("QUIRE_LOG_LEVEL", "VLLM_LOGGING_LEVEL"):
        if os.environ.get(name):
            return _choice(name, os.environ[name].upper(), LOG_LEVELS)
    return default


def log_format() -> str:
    """QUIRE_LOG_FORMAT: text or json.

    Raises:
        ConfigError: it is none of these.
    """
    return _choice("QUIRE_LOG_FORMAT", (os.environ.get("QUIRE_LOG_FORMAT") or "text").lower(), LOG_FORMATS)


def omp_num_threads() -> int | None:
    """OMP_NUM_THREADS: most compute threads on the CPU, as other numeric libraries read it; None = not set."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() and int(value) > 0 else None


def cache_dir() -> Path | None:
    """QUIRE_CACHE_DIR: where Quire keeps what it can make again; by default `quire` in the user's cache directory.

    None where neither the variable nor a home directory says where that is.
    """
    own, shared = os.environ.get("QUIRE_CACHE_DIR", ""), os.environ.get("XDG_CACHE_HOME", "")
    if own:
        return Path(own).expanduser()
    if os.path.isabs(shared):  # others are invalid and ignored, says the XDG base directory specification
        return Path(shared) / "quire"
    try:
        return Path.home() / ".cache" / "quire"
    except RuntimeError:
        return None


def kernel_tier() -> str | None:
    """QUIRE_KERNEL_TIER: what `kernel_tier="auto"` stands for, so that a whole run uses one tier; None = the best."""
    return os.environ.get("QUIRE_KERNEL_TIER") or None


def native_library() -> Path | None:
    """QUIRE_NATIVE_LIBRARY: a build of the native kernels to load in place of the installed one; None = not set.

    For builds with sanitizers and of other compilers; processes started by this one inherit it.
    """
    value = os.environ.get("QUIRE_NATIVE_LIBRARY", "")
    return Path(value) if value else None


def api_key() -> str | None:
    """QUIRE_API_KEY, else VLLM_API_KEY: a key to show to a server of Quire's; None = not set."""
    return next(iter(api_keys()), None)


def api_keys() -> tuple[str, ...]:
    """QUIRE_API_KEY and VLLM_API_KEY: keys that requests to the server must show one of."""
    return tuple(key for name in ("QUIRE_API_KEY", "VLLM_API_KEY") if (key := os.environ.get(name)))


def vllm_variables() -> dict[str, str]:
    """Every variable of vLLM's that is set, by name, in order."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("VLLM_")}


def plugins() -> frozenset[str] | None:
    """QUIRE_PLUGINS: packages whose plugins may be used, with commas between; "" = none; None = not set: all."""
    value = os.environ.get("QUIRE_PLUGINS")
    return None if value is None else frozenset(filter(None, (part.strip() for part in value.split(","))))


def openai_api_key() -> str | None:
    """OPENAI_API_KEY: a key to show to a server, as OpenAI's clients read it; None = not set."""
    return os.environ.get("OPENAI_API_KEY") or None


def hub_cache() -> Path:
    """HF_HUB_CACHE, else `hub` in HF_HOME: where models of the hub are kept, for all programs that use it."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(named)).expanduser() if named else hub_home() / "hub"


def hub_home() -> Path:
    """HF_HOME, else `huggingface` in the user's cache directory."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(home)).expanduser()


def hub_endpoint() -> str:
    """HF_ENDPOINT: address of the hub, without a slash at its end."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def hub_is_offline() -> bool:
    """HF_HUB_OFFLINE, or TRANSFORMERS_OFFLINE: the hub is not to be asked for anything."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def hub_token() -> str | None:
    """HF_TOKEN, or the one that `hf auth login` keeps in a file: shown to the hub; None = there is none."""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if not token:
        named = os.environ.get("HF_TOKEN_PATH")
        path = Path(os.path.expandvars(named)).expanduser() if named else hub_home() / "token"
        try:
            token = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
    return token.replace("\r", "").replace("\n", "").strip() or None


def prefer_sleeping_threads() -> None:
    """Let idle compute threads sleep early (GOMP_SPINCOUNT=10000), unless the user set a policy of their own.

    By default GNU OpenMP's threads spin for milliseconds while they wait. When another process wants the same CPUs,
    each parallel loop of a small model then takes a scheduler's time slice. 10000 turns cost nothing on an idle
    machine (docs/LOG.md). Read by libgomp when torch is loaded, so it has no effect after that.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def launcher_variables() -> dict[str, str]:
    """RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT as torchrun sets them; those set."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: os.environ[name] for name in names if name in os.environ}


def prefer_gloo_interface(name: str) -> None:
    """GLOO_SOCKET_IFNAME, unless it is set: the network interface where gloo, of torch, finds other machines."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def launcher_has_store() -> bool:
    """TORCHELASTIC_USE_AGENT_STORE: what listens at MASTER_ADDR:MASTER_PORT is torchrun's, not rank 0's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def notify_socket() -> str | None:
    """NOTIFY_SOCKET: the socket to which systemd wants reports, as sd_notify(3) says; None = it wants none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    return address if address.startswith(("/", "@")) and len(address) > 1 else None


def watchdog_s() -> float:
    """WATCHDOG_USEC in seconds, if it is for this process (WATCHDOG_PID): how often systemd wants a sign of life."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    return int(usec) / 1e6 if usec.isdecimal() and pid in ("", str(os.getpid())) else 0.0


def _choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value in choices:
        return value
    close = nearest(value, choices)
    hint = f"did you mean {close}?" if close else f"use one of {', '.join(choices)}"
    raise ConfigError(f"{name}={value[:80]!r} is not one of {', '.join(choices)}", hint=hint, field=name)
