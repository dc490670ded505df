"""What every test may ask for; each kind of fixture has a module of its own."""

pytest_plugins = [
    "fixtures.claims",
    "fixtures.database",
    "fixtures.deciding",
    "fixtures.leaks",
    "fixtures.naming",
    "fixtures.nowhere",
    "fixtures.program",
    "fixtures.proxy",
    "fixtures.shared",
    "fixtures.serverlog",
    "fixtures.waking",
]
