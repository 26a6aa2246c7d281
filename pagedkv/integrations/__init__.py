"""pagedkv inside other people's serving code. Each module needs the package that it is named after."""
