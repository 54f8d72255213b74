"""How frameworks spread a checkpoint over files and folders: each file here knows one of them."""
