"""The server with seeded cohorts and noise, to go with the seeded ClientApp."""

from pathlib import Path

from fedveil.flower import server_app

app = server_app(Path(__file__).with_name("run.toml"), root=0)
