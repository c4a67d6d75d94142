"""Ways in for people who come from elsewhere: functions and options of other libraries to specs.

Nothing here plans or emits: an importer ends where a `.attn` file would begin. Needs torch; `attngen` itself imports it
when a name of it is first used.
"""

from attngen.importers.cudnn import from_cudnn
from attngen.importers.flash import from_flash
from attngen.importers.flex import from_flex
from attngen.importers.imported import Imported
from attngen.importers.sdpa import from_sdpa

__all__ = ["Imported", "from_cudnn", "from_flash", "from_flex", "from_sdpa"]
