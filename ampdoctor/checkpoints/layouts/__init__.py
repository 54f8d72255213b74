"""How frameworks lay a checkpoint out over files and folders: each file here knows one of them."""
