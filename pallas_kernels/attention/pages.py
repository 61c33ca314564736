from pallas_kernels.kv_pages import PAGE, KVPages, append, load_block, pages_struct, read_tokens  # noqa: F401
