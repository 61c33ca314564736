"""More than one engine: which replica a request goes to, for whoever starts them. No command here starts more than one yet."""
