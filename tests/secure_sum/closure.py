"""What a server with its colluding nodes can derive, and other secrets that would have shown it the same.

The coalition has every message that was sent, and the secrets of its own nodes. It can open boxes with its own keys,
combine shares, compute masks from keys and seeds. `derive` runs this to its end. What is left is linear: uploads are sums
of inputs and masks, and a combination of uploads tells something only if every unknown mask cancels in it. `opened`
gives the sets of honest nodes for which one does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fedveil.secure_sum import masks, messages, party, shamir
from fedveil.secure_sum.messages import MASK_KEY, SELF_SEED


@dataclass
class Knowledge:
    """Private mask keys and own seeds by node; from these, the seeds of masks."""

    mask_keys: dict[int, bytes] = field(default_factory=dict)
    own: dict[int, bytes] = field(default_factory=dict)

    def knows_pair(self, one: int, two: int) -> bool:
        return one in self.mask_keys or two in self.mask_keys


def derive(session, transcript: set[bytes], coalition: dict[int, party.Party]) -> Knowledge:
    """The closure of the transcript and the coalition's states under everything that it can compute."""
    context = session.context
    known = Knowledge()
    keys: dict[int, messages.Keys] = {}
    shares: dict[tuple[int, int], dict[int, int]] = {}
    boxes = []
    for data in transcript:
        head = data[: messages.HEADER_SIZE] if data[6] == messages.Header.KIND else data
        sender, body = messages.unpack(context, head, session.roster)
        if isinstance(body, messages.Keys):
            keys[sender] = body
        elif isinstance(body, messages.Shares):
            boxes += [(sender, holder, box) for holder, box in body.boxes]
        elif isinstance(body, messages.Reveal):
            for owner, kind, share in body.shares:
                shares.setdefault((owner, kind), {})[sender] = share
    for me, state in coalition.items():
        secret = party.secrets_of(state)
        known.mask_keys[me], known.own[me] = secret.mask, secret.seed
        for owner, holder, box in boxes:
            if holder != me or owner not in keys:
                continue
            key = party._box_key(context, secret.encrypt, keys[owner].encrypt, owner, me)
            text = masks.unseal(key, box, party._box_context(context, owner, me))
            if text:
                values = [int.from_bytes(text[k : k + 33], "little") for k in (0, 33)]
                shares.setdefault((owner, MASK_KEY), {})[me] = values[0]
                shares.setdefault((owner, SELF_SEED), {})[me] = values[1]
    for (owner, kind), found in shares.items():
        # All of them at once: right as soon as there are enough, whatever number that was meant to be.
        secret = (shamir.combine(found) % 2**256).to_bytes(32, "little")
        if kind == MASK_KEY and masks.public_of(secret) == keys[owner].mask:
            known.mask_keys[owner] = secret
        if kind == SELF_SEED and party.commitment(context, owner, secret) == keys[owner].commitment:
            known.own[owner] = secret
    return known


@dataclass
class Masked:
    """How the honest uploads hang together: who has a mask that stays, and who shares an unknown one with whom."""

    nodes: list[int]
    pinned: dict[
        int, tuple
    ]  # node -> a mask of its own that nobody else's upload contains: ("own",) or ("pair", other)
    links: list[tuple[int, int]]


def structure(states: dict[int, party.Party], known: Knowledge) -> Masked:
    """The uploads of honest nodes, with the masks in them that the coalition does not know."""
    uploaded = {i: s for i, s in states.items() if s.stage >= party.UPLOADED}
    around = {
        i: set(party.neighbours(s.session.parameters, i, s.keys, s.members)) for i, s in uploaded.items()
    }
    pinned: dict[int, tuple] = {i: ("own",) for i in uploaded if i not in known.own}
    links = []
    for i in uploaded:
        for j in around[i]:
            if known.knows_pair(i, j):
                continue
            if j in uploaded and i in around[j]:
                links += [(i, j)] if i < j else []
            else:
                pinned[i] = ("pair", j)
    return Masked(sorted(uploaded), pinned, links)


def components(shape: Masked) -> list[list[int]]:
    """The honest uploads, grouped by unknown masks that two of them share."""
    group = {i: {i} for i in shape.nodes}
    for i, j in shape.links:
        if group[i] is not group[j]:
            group[i] |= group[j]
            for node in group[j]:
                group[node] = group[i]
    unique = {id(g): sorted(g) for g in group.values()}
    return sorted(unique.values())


def opened(shape: Masked) -> list[list[int]]:
    """The sets of honest nodes whose sum the coalition can compute; it learns nothing else of their vectors."""
    return [g for g in components(shape) if not any(i in shape.pinned for i in g)]


def other_seeds(
    shape: Masked,
    change: dict[int, np.ndarray],
    own: dict[int, np.ndarray],
    pair: dict[tuple[int, int], np.ndarray],
) -> tuple[dict[int, np.ndarray], dict[tuple[int, int], np.ndarray]]:
    """Masks under which inputs that differ by `change` give the very same uploads.

    Masks are seeds here (one word each). Only masks that the coalition does not know are changed: along a tree of each
    component the difference is passed on to the root, where it vanishes (same sum) or meets a mask that is pinned there.
    """
    own, pair = dict(own), dict(pair)
    links: dict[int, list[int]] = {i: [] for i in shape.nodes}
    for i, j in shape.links:
        links[i].append(j)
        links[j].append(i)
    for group in components(shape):
        root = next((i for i in group if i in shape.pinned), group[0])
        order, parent = [root], {root: root}
        for i in order:
            for j in links[i]:
                if j not in parent:
                    parent[j] = i
                    order.append(j)
        left = {i: change[i].copy() for i in group}  # what the masks of i must take back
        for i in reversed(order[1:]):
            up = parent[i]
            low, high = min(i, up), max(i, up)
            sign = 1 if i == low else -1
            pair[low, high] = (
                pair[low, high] - np.uint32(1) * left[i] if sign > 0 else pair[low, high] + left[i]
            )
            left[up] = left[up] + left[i]
        if root in shape.pinned:
            kind = shape.pinned[root]
            if kind == ("own",):
                own[root] = own[root] - left[root]
            else:
                low, high = min(root, kind[1]), max(root, kind[1])
                pair[low, high] = (
                    pair[low, high] - left[root] if root == low else pair[low, high] + left[root]
                )
        else:
            assert not left[root].any(), "another sum cannot look the same"
    return own, pair
