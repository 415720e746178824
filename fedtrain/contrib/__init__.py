"""Optional parts. pyproject.toml names each as an entry point; no other part of fedtrain imports them."""
