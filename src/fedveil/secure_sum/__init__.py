"""A sum of integer vectors that nobody sees in parts: double masks with recovery of drop-outs.

One pure state machine per party (`party` for a node, `coordinator` for the server), messages as bytes (`messages`), what
the integers mean (`parameters`), how many nodes share masks with whom (`graph`), and the noise that every node puts
into its own vector (`noise`). No clock, no network, no disk, no torch. docs/secure-sum.md has the protocol and the proof.
"""
