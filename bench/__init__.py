"""Side-by-side races of local private training against peers. Run with `python -m bench`."""
