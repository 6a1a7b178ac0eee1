"""What not every run needs: each file fills ports of the core, or stands on its public face. All are loaded here."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
