//! Enums whose values have names.

/// Defines an enum from its variants and their names. Beside it: `ALL` in order, `name` and
/// `of_name`.
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* $vis:vis enum $Named:ident {
        $($(#[$of:meta])* $Variant:ident = $text:literal,)+
    }) => {
        $(#[$meta])*
        $vis enum $Named {
            $($(#[$of])* $Variant,)+
        }

        impl $Named {
            /// All of them, in order.
            pub const ALL: [Self; [$($text),+].len()] = [$(Self::$Variant),+];

            /// Its name in configurations, messages, metrics and Python.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$Variant => $text,)+
                }
            }

            /// The one of that name.
            pub fn of_name(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|known| known.name() == name)
            }
        }
    };
}
