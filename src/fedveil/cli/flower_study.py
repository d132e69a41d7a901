"""`fedveil flower`: the papers of a study. Contracts, identities, the roster, and a node's books."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from fedveil.cli.common import JsonFlag, TrustFlag, emit
from fedveil.errors import UserError

if TYPE_CHECKING:
    from fedveil.federation.config import RunConfig
    from fedveil.privacy.events import Observer, Unit

RosterOption = Annotated[Path, typer.Option("--roster", help="File of the roster.")]
KeyOption = Annotated[Path, typer.Option("--key", help="Identity key of the study's owner.")]
DEFAULT_ROSTER, DEFAULT_KEY = Path("roster.json"), Path("owner.key")


def register(group: typer.Typer) -> None:
    for command in (contract, identity, invite, accept, admit, remove, rotate, anchor):
        group.command()(command)


def contract(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The contract (TOML).")],
    config: Annotated[
        str | None, typer.Option(help="Write FILE for this study: a configuration or a recipe.")
    ] = None,
    public: Annotated[
        Path | None, typer.Option(help="Public rows (.csv, .npz) with the study's columns.")
    ] = None,
    target: Annotated[str, typer.Option(help="Column to predict.")] = "",
    examples: Annotated[int, typer.Option(min=0, help="Records of the node that take part (public).")] = 0,
    column_range: Annotated[
        list[str],
        typer.Option("--range", help="Public range of a column: NAME=LOW:HIGH (else that of --public)."),
    ] = [],
    classes: Annotated[
        str, typer.Option(help="Names of the classes in order, with commas (else those of --public).")
    ] = "",
    epsilon: Annotated[
        str, typer.Option(help="For the life of the ledger; 'unlimited' promises nothing.")
    ] = "",
    delta: Annotated[float, typer.Option(help="Below 1/records.")] = 1e-5,
    observer: Annotated[str, typer.Option(help="Against whom: server, participants, public.")] = "server",
    unit: Annotated[str, typer.Option(help="About what: example, client, reported-weight.")] = "example",
    until: Annotated[str, typer.Option(help="End of the contract: 2027-01-31T00:00:00Z.")] = "",
    study: Annotated[str, typer.Option(help="Name of the study.")] = "study",
    version: Annotated[int, typer.Option(min=1, help="Number of this version.")] = 1,
    submitter: Annotated[
        list[str], typer.Option(help="Public key (64 digits) that must sign requests; may be given often.")
    ] = [],
    roster_owner: Annotated[
        str, typer.Option(help="Secure sums: public key (64 digits) of the one who signs the roster.")
    ] = "",
    change: Annotated[list[str], typer.Option("--set", help="Change a key of the configuration.")] = [],
    diff: Annotated[
        Path | None, typer.Option(help="Say what FILE changes against this older version.")
    ] = None,
    sign: Annotated[
        Path | None, typer.Option(help="Sign FILE with this identity key (writes FILE.sig).")
    ] = None,
    check: Annotated[
        str | None, typer.Option(help="Compare this private data file with FILE. Nothing is sent.")
    ] = None,
    trust_code: TrustFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Write, show, compare, sign or try a contract: what the owner of data agrees to.

    Examples:

      fedveil flower contract flu.toml --config study.toml --public public.csv --target outcome --examples 350 --epsilon 8

      fedveil flower contract flu.toml                       # show it, with its digest

      fedveil flower contract flu-2.toml --diff flu.toml

      fedveil flower contract flu.toml --check patients.csv
    """
    from fedveil.flower import contract as contracts
    from fedveil.flower import onboard

    if config is not None:
        if public is None or not examples or not epsilon:
            raise UserError("--config needs --public FILE, --examples N and --epsilon E")
        ranges = dict(_range(text) for text in column_range)
        names = [name.strip() for name in classes.split(",") if name.strip()]
        data = onboard.data_of_public(public, target, examples, ranges, names)
        agreed = onboard.contract_of_study(
            _config(config, change, trust_code), data, study=study, epsilon=_epsilon(epsilon),
            observer=cast("Observer", observer), unit=cast("Unit", unit),
            delta=delta, valid_until=until, submitters=submitter, version=version, roster_owner=roster_owner,
        )  # fmt: skip
        contracts.write_contract(file, agreed)
    agreed = contracts.read_contract(file)
    if sign is not None:
        from fedveil.flower.identity import read_identity

        contracts.sign_file(file, read_identity(sign))
    changed = contracts.differences(contracts.read_contract(diff), agreed) if diff is not None else []
    complaints: list[str] = []
    if check is not None:
        from fedveil.flower.owndata import complaints as look
        from fedveil.flower.owndata import read_rows

        if agreed.data is None:
            raise UserError(f"{file} describes no data")
        complaints = look(read_rows(check, agreed.data), agreed.data)

    def show() -> None:
        if diff is not None:
            print("\n".join(changed) or "nothing changes")
        elif check is not None:
            print("\n".join(complaints) or f"{check} is as the contract says")
        else:
            print("\n".join(onboard.summary(agreed)))
        print(f"digest {agreed.digest}")

    emit(
        {"file": str(file), "digest": agreed.digest, "contract": contracts.to_json(agreed), "changes": changed,
         "complaints": complaints},
        as_json,
        show,
    )  # fmt: skip


def _config(name: str, change: list[str], trust_code: bool) -> RunConfig:
    from fedveil.federation.config import TRUSTED, load_config
    from fedveil.federation.store import refuse_named_code

    TRUSTED.set(trust_code)
    config = load_config(name, change)
    refuse_named_code(config, trust_code)
    return config


def _epsilon(text: str) -> float | None:
    if text == "unlimited":
        return None
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--epsilon {text!r}: a number, or 'unlimited'") from None


def _range(text: str) -> tuple[str, tuple[float, float]]:
    name, _, pair = text.partition("=")
    low, _, high = pair.partition(":")
    try:
        return name, (float(low), float(high))
    except ValueError:
        raise UserError(f"--range {text!r}: write NAME=LOW:HIGH, as age=0:120") from None


def identity(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file of the secret key.")],
) -> None:
    """Make an identity key (Ed25519): of a study's owner, of a server that signs requests, of a node.

    Example:  fedveil flower identity owner.key
    """
    from fedveil.flower.identity import write_identity

    print(f"public key {write_identity(file).hex()}")


def invite(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new node.")],
    roster: RosterOption = DEFAULT_ROSTER,
    key: KeyOption = DEFAULT_KEY,
    study: Annotated[str, typer.Option(help="Name of the study, for its first node.")] = "",
    superlink: Annotated[str, typer.Option(help="Address of the SuperLink, HOST:PORT.")] = "",
    ca: Annotated[Path | None, typer.Option(help="Certificate of the SuperLink's authority.")] = None,
    contract: Annotated[
        Path | None, typer.Option(help="The study's contract, for the node's owner to agree to.")
    ] = None,
    number: Annotated[
        int | None, typer.Option(min=0, help="Number of the node (default: the next free one).")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Days until the invitation expires.")] = 14,
    out: Annotated[Path | None, typer.Option(help="File to write (default: NAME.invite.json).")] = None,
) -> None:
    """Write an invitation for a node; its owner answers with `fedveil flower accept`.

    Example:

      fedveil flower invite clinic-a --study flu --superlink fl.example.org:8000 --ca tls/ca.crt --contract flu.toml
    """
    from fedveil.flower import onboard
    from fedveil.flower.identity import read_identity

    path = out or Path(f"{name}.invite.json")
    given = onboard.invite(path, roster, read_identity(key), name, study=study, number=number, superlink=superlink,
                           ca=ca, contract=contract, days=days)  # fmt: skip
    print(
        f"{path}: node {given} ({name}); expires in {days} days. Its owner runs: fedveil flower accept {path.name}"
    )


def accept(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An invitation.")],
    home: Annotated[Path, typer.Option(help="New folder of the node's keys, contract and books.")] = Path(
        "node"
    ),
    data: Annotated[str, typer.Option(help="The node's own data file.")] = "",
    agree: Annotated[bool, typer.Option("--agree", help="Agree to the contract that was shown.")] = False,
) -> None:
    """Join a study: shows the contract; with --agree makes the node's keys and the answer to send back.

    Example:  fedveil flower accept clinic-a.invite.json --home /etc/fedveil --data /srv/patients.csv --agree
    """
    from fedveil.flower import limits, onboard
    from fedveil.flower.contract import from_json

    if not agree:
        value = limits.json_file(file, "invitation")
        text = value.get("document", {}).get("contract", "") if isinstance(value, dict) else ""
        try:
            shown = (
                onboard.summary(from_json(limits.tomllib.loads(text)))
                if text
                else ["the invitation holds no contract"]
            )
        except (limits.Malformed, ValueError, AttributeError):
            raise UserError(f"{file}: its contract cannot be read") from None
        print("\n".join(shown) + "\nNothing was written. Add --agree to join.")
        return
    made = onboard.accept(file, home, data)
    print(f"Send back: {made.answer}. The keys stay in {home}.")
    print(f"Then start:  fedveil flower node --home {home}")
    print(f"(trainer and SuperNode. Under two accounts, see docs/deploy.md; the trainer's settings are in {home}/node-config)")


def admit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A node's answer (joined or rotated).")],
    roster: RosterOption = DEFAULT_ROSTER,
    key: KeyOption = DEFAULT_KEY,
) -> None:
    """Take a node's answer into the roster: it joins, or its keys change.

    Example:  fedveil flower admit clinic-a.joined.json
    """
    from fedveil.flower import onboard
    from fedveil.flower.identity import read_identity

    new, changed = onboard.admit(file, roster, read_identity(key))
    print("\n".join(changed) + f"\nroster version {new.version}, digest {new.digest}")
    for member in new.members:
        if member.supernode:
            path = roster.with_name(f"{member.name}.pub")
            path.write_text(member.supernode + "\n", "utf-8")
    print(f"Register the SuperNode key: flwr supernode register {roster.parent / 'NAME.pub'} CONNECTION")


def remove(
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="The node's number.")],
    roster: RosterOption = DEFAULT_ROSTER,
    key: KeyOption = DEFAULT_KEY,
) -> None:
    """Take a node out of the roster. Its replies no longer count, and its number is never given out again.

    Example:  fedveil flower remove 3
    """
    from fedveil.flower import onboard
    from fedveil.flower.identity import read_identity

    new, changed = onboard.remove(roster, number, read_identity(key))
    print("\n".join(changed) + f"\nroster version {new.version}, digest {new.digest}")


def rotate(
    home: Annotated[Path, typer.Option(help="Folder of the node.")] = Path("node"),
    finish: Annotated[
        bool, typer.Option("--finish", help="The roster knows the new keys: use them from now on.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Statement for the study's owner.")] = Path("rotated.json"),
) -> None:
    """Change a node's keys: makes new ones and a statement signed by old and new, for `fedveil flower admit`.

    Examples:

      fedveil flower rotate --home /etc/fedveil

      fedveil flower rotate --home /etc/fedveil --finish
    """
    from fedveil.flower import onboard

    if finish:
        onboard.finish_rotation(home)
        print("The new keys are in use; restart trainer and SuperNode.")
    else:
        print(f"Send to the study's owner: {onboard.rotate(home, out)}")


def anchor(
    node_config: Annotated[str, typer.Option("--node-config", help="As for the trainer.")],
    forget: Annotated[
        bool,
        typer.Option("--forget", help="The ledger is lost for good: forget what is known of it. Recorded."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare a node's ledger with the head that is kept in a second place, and by the witness if it has one.

    Examples:

      fedveil flower anchor --node-config 'home="/var/lib/fedveil" …'

      fedveil flower anchor --forget --node-config 'home="/var/lib/fedveil" …'
    """
    from fedveil.cli.flower import parse_node_config
    from fedveil.flower import books
    from fedveil.flower.owner import owner_of
    from fedveil.privacy.ledger import journal

    owner = owner_of(parse_node_config(node_config))
    path = books.ledger_path(owner.home)
    if forget:
        gone = books.forget(owner)
        emit(
            {"forgotten": gone},
            as_json,
            lambda: print("forgotten: " + (", ".join(gone) or "nothing was known")),
        )
        return
    expected = books.last_known(owner)
    records = journal.read(path).records if path.exists() else ()
    good = expected is None or (expected[0] < len(records) and records[expected[0]].hash == expected[1])
    found = {
        "ledger": str(path),
        "records": len(records),
        "anchor": expected[0] if expected else None,
        "good": good,
    }
    said = (
        "agree"
        if good
        else "DO NOT AGREE: the ledger is lost, cut, rolled back or exchanged (docs/runbook.md)"
    )
    emit(
        found,
        as_json,
        lambda: print(f"{path}: {len(records)} records, anchored {found['anchor']}: they {said}"),
    )
    if not good:
        raise typer.Exit(1)
