"""The settings of `headrace gateway`: its own, and those of `headrace serve` that are not about an engine."""

from __future__ import annotations

from server.config import GatewayConfig
from server.serve_settings import SETTINGS
from server.setting import GATEWAY, Setting

GATEWAY_OWN_SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="register",
        field="register",
        section=GATEWAY,
        config=GatewayConfig,
        help="The registry of the workers: redis://..., k8s:NAMESPACE/SERVICE:PORT, static:FILE or static:URL,URL.",
        metavar="SPEC",
    ),
    Setting(
        name="wire-key-file",
        field="wire_key_file",
        section=GATEWAY,
        config=GatewayConfig,
        help="The gateway's key pair, of `headrace keys pair`: workers have its public key in their list of clients.",
        metavar="FILE",
    ),
    Setting(
        name="wire-clients-file",
        field="wire_clients_file",
        section=GATEWAY,
        config=GatewayConfig,
        help="Public keys of the other gateways, one a line; read again when it changes.",
        metavar="FILE",
    ),
    Setting(
        name="insecure",
        field="insecure",
        section=GATEWAY,
        config=GatewayConfig,
        help="With a key of its own, also use workers on other machines that have none, in the clear.",
    ),
    Setting(
        name="dispatches-listen",
        field="dispatches_listen",
        section=GATEWAY,
        config=GatewayConfig,
        help="Where other gateways learn of this one's dispatches: tcp://HOST:PORT; API processes take the next ports.",
        metavar="ADDRESS",
    ),
    Setting(
        name="advertise",
        field="advertise",
        section=GATEWAY,
        config=GatewayConfig,
        help="The host by which other gateways reach this one; taken from --dispatches-listen unless set.",
        metavar="HOST",
    ),
    Setting(
        name="tokenizer",
        field="tokenizer",
        section=GATEWAY,
        config=GatewayConfig,
        help="The model whose tokenizer engines of other makes have, as `headrace serve` takes it; or MODEL=SOURCE,...",
        metavar="SOURCE",
    ),
    Setting(
        name="engine-key-file",
        field="engine_key_file",
        section=GATEWAY,
        config=GatewayConfig,
        help="The API key that engines of other makes ask for.",
        metavar="FILE",
    ),
)

GATEWAY_SETTINGS: tuple[Setting, ...] = (
    *GATEWAY_OWN_SETTINGS,
    *(one for one in SETTINGS if not one.field.startswith(("engine.", "cores.")) and one.name != "replicas"),
)
