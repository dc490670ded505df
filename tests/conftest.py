"""What every test may ask for; each kind of fixture has a module of its own."""

pytest_plugins = [
    "fixtures.claims",
    "fixtures.database",
    "fixtures.leaks",
    "fixtures.naming",
    "fixtures.program",
    "fixtures.proxy",
    "fixtures.shared",
    "fixtures.serverlog",
]
